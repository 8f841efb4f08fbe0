"""Each kernel against a reference in higher precision, over random shapes."""
