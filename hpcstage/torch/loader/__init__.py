"""PyTorch's loader with threads in each worker (Yang and Cong), and with this package's samplers as options."""
