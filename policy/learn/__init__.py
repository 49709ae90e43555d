"""Make the narrowest manifest of what a run was seen to do, within the ceiling under which it was observed."""
