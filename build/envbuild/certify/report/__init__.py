"""What a certification tells people and CI: JUnit XML and one page of HTML, also where it failed."""
