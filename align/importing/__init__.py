"""Block drafters out of the folders of other engines: what their config.json and tensors say, in
this project's terms."""
