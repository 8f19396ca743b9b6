"""One server in several processes: the supervisor, and the communication between the processes."""
