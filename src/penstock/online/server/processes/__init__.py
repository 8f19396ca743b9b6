"""One server in several processes: the supervisor, and how the processes talk to each other."""
