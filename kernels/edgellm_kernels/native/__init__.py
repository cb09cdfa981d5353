"""The native kernel library: C++17 sources and the builder that compiles them. Nothing is imported here."""
