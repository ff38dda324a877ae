"""A saved model on a page: what `vanilla-transformer demo` opens in a browser."""
