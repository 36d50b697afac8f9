"""The keeper: a small helper process, standard library only, that owns every sandbox of a runner.

It is started with `python -I -S`, without the rest of Gyre, so nothing here may import outside this folder and the standard library.
"""
