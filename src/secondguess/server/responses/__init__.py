"""`/v1/responses`: a chat whose reply consists of items; nothing is stored between requests."""
