"""When drafting pays, and how much to draft: from measured costs and acceptance."""
