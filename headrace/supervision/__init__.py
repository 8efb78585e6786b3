"""One host's processes: started, watched, restarted and ended."""
