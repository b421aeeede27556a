"""Mathematics: the transformer and its parts, written for one device of the mesh."""
