"""How the target's text comes to be: rows of numbered batches, written in this process, in several, or by a server."""
