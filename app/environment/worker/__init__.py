"""What runs in a worker process: the loop that serves the driver, episodes, and the policy that they ask."""
