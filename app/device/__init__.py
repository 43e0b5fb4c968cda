"""The device seam: everything that differs between CPU, CUDA and NPU stands in one `Device` value."""
