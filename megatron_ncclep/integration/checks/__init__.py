"""What is refused beside the dispatcher, and when it is found."""
