"""Wire formats of providers, one file each, behind `base.Dialect`."""
