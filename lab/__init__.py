"""The lab: the distribution `tokenyard-lab` (`lab/src`), its tests, and the training of the model that it ships."""
