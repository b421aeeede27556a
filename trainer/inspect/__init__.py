"""What a step holds, moves and costs; whether layouts are equal."""
