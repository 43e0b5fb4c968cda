"""The worker process: the loop that serves the driver, the episodes, and the policy that they sample from."""
