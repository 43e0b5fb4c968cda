"""The policy of an episode as an HTTP server, for agents that bring a client of their own."""
