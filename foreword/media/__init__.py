"""Pictures from the outside: fetched, decoded where they can do no harm, and prepared for a model."""
