"""The numbers of the default policy, as functions that numba compiles."""
