"""The steps plan, dispatch and combine, with autograd."""
