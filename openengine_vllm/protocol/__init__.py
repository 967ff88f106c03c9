"""The contract as Python: a package of generated messages for each revision of the schema, and
what is true of the contract whoever serves it: errors, limits and revision numbers."""
