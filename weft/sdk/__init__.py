"""What programs of users import: readers of generated text. Standard library only; knows no other part of Weft."""
