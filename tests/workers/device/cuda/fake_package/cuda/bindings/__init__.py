"""The strict stand-in, under the name of the real bindings."""
