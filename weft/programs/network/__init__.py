"""HTTP for programs: what they may reach, and how answers are kept from doing harm."""
