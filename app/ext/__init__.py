"""What the pages of extensions show. A page whose extension is not there is not listed."""
