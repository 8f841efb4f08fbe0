"""What gateway and workers share: plain values and their packed forms. Free of torch."""
