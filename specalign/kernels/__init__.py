"""C kernels for matrix products and layers with few rows on a CPU. Independent of models and
recipes."""
