"""What ran when, on which stream: the record, and the page that shows it."""
