"""Plain values, and their packed forms, that gateway and workers exchange. This package does not import torch."""
