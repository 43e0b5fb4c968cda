"""Memory offload of the trainer, where it shares devices with the engines."""
