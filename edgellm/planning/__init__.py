"""What a model costs before it is loaded: sizes, speeds and what speculation would bring. Pure arithmetic."""
