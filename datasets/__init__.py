"""The datasets: one file each, saying where it comes from, its checksum, its licence and how a row is read."""
