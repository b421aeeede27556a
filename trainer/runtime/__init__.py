"""Devices, processes, and how they are started and stopped."""
