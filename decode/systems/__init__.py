"""Systems (named ways to decode): their declaration, parsing and construction."""
