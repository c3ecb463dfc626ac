"""Export drafters to the formats of other engines, and check that an export is the same drafter."""
