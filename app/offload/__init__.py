"""Memory offload: who holds the device's memory when trainer and engine share it."""
