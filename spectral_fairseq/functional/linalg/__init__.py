"""Products, Gram matrices and singular values that the other functions share."""
