"""What p(x | noisy x) says about an image: mean, uncertainty, draws, components, with pages."""
