"""What every room uses: errors, files, the hub, YAML, random states, provenance, tables of rows,
batches."""
