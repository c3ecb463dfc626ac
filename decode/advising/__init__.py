"""How much to draft and when drafting pays, from measured costs and acceptance."""
