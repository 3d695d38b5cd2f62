"""What `torchemo bench` measures, the work that is timed, and the same work with other packages."""
