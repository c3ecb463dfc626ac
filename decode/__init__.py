"""Use a drafter to speed a target up, losslessly."""
