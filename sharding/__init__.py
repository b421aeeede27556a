"""Movement: where arrays lie on the mesh and what travels between devices. Knows no model."""
