"""What runs inside a layer on one device, block by block."""
