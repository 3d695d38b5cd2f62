"""Tables, figures and documents made from recorded studies."""
