"""Update rules, their rates and their precision."""
