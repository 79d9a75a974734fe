"""The operations on the CPU, in C++ (`csrc/`), called through ctypes."""
