"""Time: config, data, state, step, loop, disk and the command line."""
