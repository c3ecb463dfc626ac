"""Records, statistics, tables, figures and the page. Needs no torch."""
