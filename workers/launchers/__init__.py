"""Starting the ranks of groups and starting them again: through Ray, or as subprocesses of this host."""
